"use strict";
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const runs = new Map(data.runs.filter((run) => run.state !== "damaged" && run.state !== "duplicate").map((run) => [run.id, run]));

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick" || key === "onchange") made.addEventListener(key.slice(2), value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// The state of the page, which the address keeps after #: the leaderboard that is shown and the open run.
const state = { dataset: "", epsilon: "", by: "", run: "" };
const start = data.boards.find((board) => board.start) || data.boards[0] || null;
let shown = null;

function readAddress() {
  const raw = location.hash.slice(1);
  if (raw && !raw.includes("=")) return; // a place in the page
  const params = new URLSearchParams(raw);
  for (const key of Object.keys(state)) state[key] = params.get(key) || "";
}

function address() {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (value) params.set(key, value);
  return params.size ? `#${params}` : "";
}

// Opening a run adds a step to the history, which Back undoes; a switch does not.
function changed(step = false) {
  const url = location.href.split("#")[0] + address();
  if (step) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
  show();
}

const placed = (board) => (board.metrics.length ? board.rankings[board.metrics[0].key].placed.length : 0);

// The board of the address; of a data set without that ε, the one with the most places.
function currentBoard() {
  const dataset = state.dataset || (start && start.dataset);
  const boards = data.boards.filter((board) => board.dataset === dataset);
  const wanted = state.epsilon || (start && start.dataset === dataset ? start.epsilon : "");
  const most = boards.slice().sort((a, b) => placed(b) - placed(a))[0] || null;
  return boards.find((board) => board.epsilon === wanted) || most;
}

function show() {
  const now = JSON.stringify([state.dataset, state.epsilon, state.by]);
  if (now !== shown) { // otherwise the button that opened a run would be replaced and lose the focus
    shown = now;
    showBoard(currentBoard());
  }
  showRun();
}

const budget = (epsilon) => (epsilon === "inf" ? "∞" : epsilon);

function choices(name, title, options, chosen) {
  const made = options.map(([value, label]) => {
    const attributes = { type: "radio", name, value, onchange: () => { state[name] = value; changed(); } };
    const input = element("input", attributes);
    input.checked = value === chosen;
    return element("label", {}, input, element("span", {}, label));
  });
  return element("fieldset", { class: "choices" }, element("legend", {}, title), ...made);
}

function showSwitches(board, metric) {
  const focused = document.activeElement && document.activeElement.name;
  const names = new Map(data.boards.map((each) => [each.dataset, each.name]));
  const select = element("select", { name: "dataset", onchange: () => {
    state.dataset = select.value;
    state.epsilon = "";
    changed();
  } });
  for (const [value, label] of names) select.append(element("option", { value }, label));
  select.value = board.dataset;
  const epsilons = data.boards.filter((each) => each.dataset === board.dataset).map(({ epsilon }) => [epsilon, budget(epsilon)]);
  byId("switches").replaceChildren(
    element("label", { class: "choice" }, element("span", {}, "Data set"), select),
    choices("epsilon", "ε budget", epsilons, board.epsilon),
    ...(board.metrics.length > 1 ? [choices("by", "Ranked by", board.metrics.map(({ key, label }) => [key, label]), metric)] : []),
  );
  if (focused) { // the switches are made again, and keep the focus
    const again = byId("switches").querySelector(`select[name="${focused}"], input[name="${focused}"]:checked`);
    if (again) again.focus();
  }
}

const together = (text) => text.replaceAll(" ± ", "\u00a0±\u00a0"); // a value and its spread stay on one line

const opener = (id, words, title) => element(
  "button",
  { type: "button", title, "data-run": id, onclick: () => { state.run = id; changed(true); } },
  words,
);

function thumbnail(line) {
  const first = runs.get(line.runs[0].id);
  if (!first || !first.picture) return element("td", { class: "thumb soft" }, "no samples");
  const button = opener(first.id, element("img", { src: first.picture, alt: `Samples: ${first.method}, ε ${budget(first.epsilon)}` }), `open run ${first.id}`);
  return element("td", { class: "thumb" }, button);
}

const cell = (label, key, ...content) => element("td", { "data-label": label, "data-key": key }, element("span", {}, ...content));

const small = (text) => (text ? element("small", {}, text) : null);

function named(line) {
  const buttons = line.runs.map(({ id, seed }) => opener(id, `seed ${seed}`, `open run ${id}, seed ${seed}`));
  return element("th", { scope: "row" }, line.method, small(line.settings), small(line.notes.join(" · ")),
    element("small", { class: "runs" }, ...buttons));
}

function epsilons(line) {
  return cell("ε proven", "proven", budget(line.proven), ...line.epsilons.map(small));
}

function values(line, metrics, by) {
  return metrics.map(({ key, label }) => {
    const { text, by: protocol } = line.cells[key];
    const made = cell(label, key, together(text), small(protocol));
    if (key === by) made.classList.add("by");
    return made;
  });
}

const heading = (labels) => element("tr", {}, ...labels.map((label) => element("th", { scope: "col" }, label)));

function showBoard(board) {
  const table = byId("board");
  for (const figure of document.querySelectorAll("#curves figure")) figure.hidden = !board || figure.dataset.dataset !== board.dataset;
  byId("curves-none").hidden = Boolean(document.querySelector("#curves figure:not([hidden])"));
  table.hidden = byId("others").hidden = !board;
  if (!board) {
    byId("terms").textContent = data.boards.length ? "No line of this data set." : "No run is finished yet; dpgen run makes one.";
    return;
  }
  const metric = board.metrics.find(({ key }) => key === state.by) || board.metrics[0] || { key: "", label: "" };
  showSwitches(board, metric.key);
  const { placed: ranked, others } = board.rankings[metric.key] || { placed: [], others: board.lines.map((_, i) => [i, "not measured"]) };
  const lines = ranked.length === 1 ? "1 line" : `${ranked.length} lines`;
  const first = ranked.length ? `, ${metric.lower ? "lowest" : "highest"} ${metric.name} first` : " with a place";
  byId("terms").textContent = `${lines}${first}. Same for all: ${board.terms}.`;
  const labels = board.metrics.map(({ label }) => label);
  table.tHead.replaceChildren(heading(["", "Samples", "Method", "ε proven", ...labels, "Difference from the best"]));
  const end = (text) => (line) => element("tr", { class: "end" }, element("td", { class: "place" }, ""), thumbnail(line), named(line),
    epsilons(line), ...values(line, board.metrics, ""), cell("Place", "best", text));
  const upper = board.upper.map(end("upper end, not ranked"));
  const lower = board.lower.map(end("without records, not ranked"));
  const rows = ranked.map(([number, place, comparison]) => {
    const line = board.lines[number];
    return element("tr", {}, element("td", { class: "place", "data-key": "place" }, place), thumbnail(line), named(line), epsilons(line),
      ...values(line, board.metrics, metric.key), cell("Difference from the best", "best", comparison));
  });
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(...upper, ...rows, ...lower);
  showOthers(board, others);
}

function showOthers(board, others) {
  const fold = byId("others");
  fold.hidden = !others.length;
  const what = others.length === 1 ? "1 line that cannot be compared" : `${others.length} lines that cannot be compared`;
  fold.querySelector("summary").textContent = what;
  const table = byId("others-table");
  const labels = board.metrics.map(({ label }) => label);
  table.tHead.replaceChildren(heading(["Samples", "Method", "ε proven", ...labels, "Reason"]));
  table.tBodies[0].replaceChildren(...others.map(([number, why]) => {
    const line = board.lines[number];
    return element("tr", {}, thumbnail(line), named(line), epsilons(line), ...values(line, board.metrics, ""), cell("Reason", "why", why));
  }));
}

const inOrder = (a, b) => {
  const [x, y] = [Number(a === "inf" ? Infinity : a), Number(b === "inf" ? Infinity : b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en") : x === y ? 0 : x - y;
};

function showAllRuns() {
  const rank = { failed: 0, damaged: 1, interrupted: 2, preempted: 3, running: 4, empty: 5, duplicate: 6, finished: 7 };
  const order = (a, b) => (rank[a.state] ?? 5) - (rank[b.state] ?? 5) || inOrder(a.method || "", b.method || "")
    || inOrder(a.dataset || "", b.dataset || "") || inOrder(a.epsilon || "", b.epsilon || "") || inOrder(a.folder, b.folder);
  const rows = data.runs.slice().sort(order).map((run) => {
    const whole = runs.get(run.id) === run;
    const name = whole ? opener(run.id, run.id, `open run ${run.id}`) : run.folder;
    const status = run.state + (run.stale ? ", stale" : "");
    const badge = run.state === "finished" ? status : element("span", { class: "badge bad" }, status);
    const words = [["Method", run.method], ["Data set", run.dataset], ["ε budget", run.epsilon && budget(run.epsilon)], ["Seed", run.seed], ["Scale", run.scale]];
    return element("tr", {}, element("th", { class: "name", scope: "row" }, name), cell("State", "state", badge),
      ...words.map(([label, word]) => cell(label, label, word ?? "–")), cell("Remark", "remark", run.remark || "–"));
  });
  byId("all-runs").tBodies[0].replaceChildren(...rows);
}

const pairs = (list) => element("dl", { class: "pairs" },
  ...list.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));

const bullets = (lines) => element("ul", {}, ...lines.map((line) => element("li", {}, line)));

function grid({ head, rows }, label) {
  const body = rows.map((row) => element("tr", {}, ...row.map((word, i) => (i
    ? element("td", { "data-label": head[i] }, element("span", {}, word))
    : element("th", { scope: "row" }, word)))));
  return element("table", { class: "cards", "aria-label": label }, element("thead", {}, heading(head)), element("tbody", {}, ...body));
}

const folded = (title, ...children) => element("details", {}, element("summary", {}, title), ...children);

function ledgerParts(ledger) {
  if (!ledger.pairs) return [element("p", {}, "No ledger yet.")];
  const parts = [pairs(ledger.pairs)];
  for (const line of ledger.warnings) parts.push(element("p", { class: "remark" }, line));
  if (ledger.events.rows.length) parts.push(grid(ledger.events, "Releases"));
  else parts.push(element("p", {}, "No release was approved."));
  if (ledger.table.rows.length) parts.push(grid(ledger.table, "Epsilon under both relations"));
  if (ledger.out_of_scope.length) parts.push(folded("What the proofs do not cover", bullets(ledger.out_of_scope)));
  return parts;
}

function runParts(run) {
  const { command } = run;
  const parts = [];
  const line = command.line ? element("code", { class: "command" }, command.line) : null;
  parts.push(element("h3", {}, "Command"), ...(line ? [line] : []));
  if (command.note) parts.push(element("p", { class: "remark" }, command.note));
  parts.push(element("h3", {}, "Status"));
  parts.push(element("p", {}, run.state + (run.stale ? ", stale" : "") + (run.remark ? `: ${run.remark}` : "")));
  for (const line of run.evidence) parts.push(element("p", {}, line));
  for (const remark of run.remarks) parts.push(element("p", { class: "remark" }, remark));
  parts.push(element("h3", {}, "Samples"));
  parts.push(run.picture ? element("img", { src: run.picture, alt: run.alt }) : element("p", {}, run.alt));
  parts.push(element("h3", {}, "Metrics"));
  if (!run.reports.length) parts.push(element("p", {}, "Not measured."));
  for (const report of run.reports) {
    parts.push(element("h4", {}, `${report.protocol}: ${report.samples}`), pairs(report.values));
    if (report.notes.length) parts.push(bullets(report.notes));
  }
  parts.push(element("h3", {}, "Privacy ledger"), ...ledgerParts(run.ledger));
  if (run.cost.length) parts.push(element("h3", {}, "Cost"), pairs(run.cost));
  if (run.environment.length) parts.push(element("h3", {}, "Environment"), pairs(run.environment));
  parts.push(element("h3", {}, "Settings"), folded("All that the run's id is made of, besides its seed", pairs(run.settings)));
  return parts;
}

function showRun() {
  const dialog = byId("run");
  if (!state.run) {
    if (dialog.open) dialog.close();
    return;
  }
  if (dialog.open && dialog.dataset.run === state.run) return;
  const run = runs.get(state.run);
  dialog.dataset.run = state.run;
  byId("run-title").textContent = run
    ? `${run.method}, ${run.dataset}, ε budget ${budget(run.epsilon)}, seed ${run.seed} (${run.id})`
    : `No run ${state.run} in this report`;
  byId("run-body").replaceChildren(...(run ? runParts(run) : [element("p", {}, "It may be damaged, a copy, or of another results folder.")]));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

byId("run-close").addEventListener("click", () => byId("run").close());
byId("run").addEventListener("click", (event) => { if (event.target === byId("run")) byId("run").close(); });
byId("run").addEventListener("close", () => {
  if (!state.run) return;
  state.run = "";
  changed();
});

for (const link of document.querySelectorAll('a[href^="#"]')) {
  link.addEventListener("click", (event) => { // the address is reserved for the state of the page
    event.preventDefault();
    const place = byId(link.getAttribute("href").slice(1));
    if (!place) return;
    if (place.matches("details")) place.open = true;
    place.scrollIntoView();
    (place.querySelector(":scope > summary") || place).focus({ preventScroll: true });
  });
}

function searched(input, entries, textOf, none) {
  byId(input).addEventListener("input", () => {
    const query = byId(input).value.trim().toLowerCase();
    for (const entry of entries()) entry.hidden = !textOf(entry).toLowerCase().includes(query);
    if (none) byId(none).hidden = !entries().length || entries().some((entry) => !entry.hidden);
  });
}

const tables = [...document.querySelectorAll("details.table")];
searched("table-search", () => tables, (table) => table.dataset.name, "tables-none");
searched("run-search", () => [...byId("all-runs").tBodies[0].rows], (row) => row.textContent);
const setOpen = (open) => { for (const table of tables) if (!table.hidden) table.open = open; };
byId("tables-open").addEventListener("click", () => setOpen(true));
byId("tables-close").addEventListener("click", () => setOpen(false));
addEventListener("beforeprint", () => setOpen(true));

addEventListener("popstate", () => { readAddress(); show(); });
addEventListener("hashchange", () => { readAddress(); show(); });
byId("switches").addEventListener("submit", (event) => event.preventDefault());
showAllRuns();
readAddress();
show();
