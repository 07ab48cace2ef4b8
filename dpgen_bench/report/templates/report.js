"use strict";
// Texts of runs enter the page as text nodes and attributes only, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = new Map();
for (const run of data.runs) if (!["duplicate", "damaged"].includes(run.state)) runs.set(run.id, run);
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// The state of the page, which the address keeps after #: filters, sort order and the open run.
const state = { filters: {}, sort: "", down: false, run: "" };
let shown = null;

function readAddress() {
  const raw = location.hash.slice(1);
  if (raw && !raw.includes("=")) return; // a place in the page
  const params = new URLSearchParams(raw);
  state.filters = {};
  for (const { key } of data.filters) if (params.get(key)) state.filters[key] = params.get(key);
  state.sort = data.columns.some(({ key }) => key === params.get("sort")) ? params.get("sort") : "";
  state.down = params.get("order") === "down";
  state.run = params.get("run") || "";
}

function address() {
  const params = new URLSearchParams();
  for (const { key } of data.filters) if (state.filters[key]) params.set(key, state.filters[key]);
  if (state.sort) params.set("sort", state.sort);
  if (state.sort && state.down) params.set("order", "down");
  if (state.run) params.set("run", state.run);
  return params.size ? `#${params}` : "";
}

// Opening a run adds a step to the history, which Back undoes; a filter does not.
function changed(step = false) {
  const url = location.href.split("#")[0] + address();
  if (step) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
  show();
}

const numeric = new Set(data.columns.filter(({ kind }) => kind === "number").map(({ key }) => key));

// Finite numbers in order, then infinite ones, then missing ones, in both directions.
function rank(value) {
  if (value === null || value === "nan") return 2;
  return value === "inf" || value === "-inf" ? 1 : 0;
}

function compare(one, other, key) {
  const [a, b] = [one.cells[key].value, other.cells[key].value];
  const sign = state.down ? -1 : 1;
  if (!numeric.has(key)) return sign * String(a).localeCompare(String(b), "en");
  return rank(a) - rank(b) || (rank(a) === 0 ? sign * (a - b) : 0);
}

function visibleLines() {
  const kept = data.lines.filter((line) =>
    Object.entries(state.filters).every(([key, value]) => line.filters[key] === value));
  return state.sort ? kept.slice().sort((a, b) => compare(a, b, state.sort)) : kept;
}

function show() {
  const now = JSON.stringify([state.filters, state.sort, state.down]);
  if (now !== shown) { // otherwise the button that opened a run would be replaced and lose the focus
    shown = now;
    showFilters();
    const lines = visibleLines();
    showHead();
    showLines(lines);
    showComparable(lines);
    showSamples(lines);
  }
  showRun();
}

const inOrder = (a, b) => {
  const [x, y] = [Number(a === "inf" ? Infinity : a), Number(b === "inf" ? Infinity : b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en") : x === y ? 0 : x - y;
};

function makeFilters() {
  for (const { key, label } of data.filters) {
    const select = element("select", { name: key });
    select.append(element("option", { value: "" }, "all"));
    const values = [...new Set(data.lines.map((line) => line.filters[key]))].sort(inOrder);
    for (const value of values) select.append(element("option", { value }, value));
    select.addEventListener("change", () => {
      if (select.value) state.filters[key] = select.value;
      else delete state.filters[key];
      changed();
    });
    byId("filters").append(element("label", {}, label, select));
  }
  const clear = () => { state.filters = {}; changed(); };
  byId("filters").append(element("button", { type: "button", onclick: clear }, "Clear filters"));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
}

function showFilters() {
  for (const select of byId("filters").querySelectorAll("select")) {
    const chosen = state.filters[select.name] || "";
    const known = [...select.options].some((option) => option.value === chosen);
    if (!known) select.append(element("option", { value: chosen }, `${chosen} (none here)`));
    select.value = chosen;
  }
}

function showHead() {
  const row = byId("board").tHead.rows[0];
  if (!row.cells.length) {
    for (const { key, label } of data.columns) {
      const sort = () => {
        state.down = state.sort === key && !state.down;
        state.sort = key;
        changed();
      };
      const arrow = element("span", { class: "arrow", "aria-hidden": "true" });
      const button = element("button", { type: "button", onclick: sort }, `${label}\u00a0`, arrow);
      row.append(element("th", { scope: "col", "data-key": key }, button));
    }
    row.append(element("th", { scope: "col" }, "runs"));
  }
  for (const cell of row.querySelectorAll("[data-key]")) {
    const used = cell.dataset.key === state.sort;
    cell.setAttribute("aria-sort", used ? (state.down ? "descending" : "ascending") : "none");
    cell.querySelector(".arrow").textContent = used ? (state.down ? "▼" : "▲") : "↕";
  }
}

const together = (text) => text.replaceAll(" ± ", "\u00a0±\u00a0"); // a value and its spread stay on one line

const opener = (id, words, title) => element(
  "button",
  { type: "button", title, "data-run": id, onclick: () => { state.run = id; changed(true); } },
  words,
);

function showLines(lines) {
  const rows = lines.map((line) => {
    const row = element("tr");
    for (const { key } of data.columns) {
      const text = line.cells[key].text;
      if (key === "method") {
        const stale = line.stale ? element("span", { class: "badge" }, "stale") : null;
        const settings = line.settings ? element("span", { class: "settings" }, line.settings) : null;
        row.append(element("th", { scope: "row" }, text, stale ? " " : null, stale, settings));
      } else {
        const kind = numeric.has(key) ? "number" : key === "relation" || key === "protocol" ? "wide" : null;
        const { detail } = line.cells[key];
        const more = detail ? element("span", { class: "settings" }, detail) : null;
        row.append(element("td", { "data-key": key, class: kind }, together(text), more));
      }
    }
    const buttons = line.runs.map(({ id, seed }) => opener(id, `seed ${seed}`, `open run ${id}, seed ${seed}`));
    row.append(element("td", { class: "runs" }, ...buttons));
    return row;
  });
  byId("board").tBodies[0].replaceChildren(...rows);
  byId("count").textContent = data.lines.length
    ? `${lines.length} of ${data.lines.length} lines`
    : "No run is finished yet; dpgen run makes one.";
}

function showComparable(lines) {
  const several = [];
  for (const { key, label } of data.terms) {
    const values = new Set(lines.map((line) => line.terms[key]));
    values.delete(null); // a run without privacy has no relation, δ or accountant
    if (values.size > 1) several.push(`${values.size} ${label} (${[...values].sort(inOrder).join(", ")})`);
  }
  const remark = byId("comparable");
  remark.hidden = !several.length;
  remark.textContent = several.length
    ? `Not comparable: these lines are of ${several.join("; ")}. Figures may be compared only on one data set, under one relation, δ, accountant and unit, by one protocol and at one scale.`
    : "";
}

function showSamples(lines) {
  const settings = new Map();
  for (const line of lines) for (const { id } of line.runs) settings.set(id, line.settings);
  const wanted = [...settings.keys()].map((id) => runs.get(id));
  const groups = new Map();
  for (const run of wanted) {
    if (!groups.has(run.dataset)) groups.set(run.dataset, new Map());
    const inside = groups.get(run.dataset);
    if (!inside.has(run.epsilon)) inside.set(run.epsilon, []);
    inside.get(run.epsilon).push(run);
  }
  const parts = [];
  for (const dataset of [...groups.keys()].sort(inOrder)) {
    parts.push(element("h3", {}, dataset));
    for (const epsilon of [...groups.get(dataset).keys()].sort(inOrder)) {
      parts.push(element("h4", {}, `ε budget ${epsilon}`));
      const found = groups.get(dataset).get(epsilon);
      found.sort((a, b) => inOrder(a.method, b.method) || inOrder(a.seed, b.seed) || inOrder(a.id, b.id));
      parts.push(element("div", { class: "grids" }, ...found.map((run) => sample(run, settings.get(run.id)))));
    }
  }
  byId("grids").replaceChildren(...(parts.length ? parts : [element("p", {}, "None.")]));
}

function sample(run, settings) {
  const more = settings ? element("span", { class: "caption soft" }, settings) : null;
  const caption = element("span", { class: "caption" }, `${run.method}, seed ${run.seed}, ${run.scale}`, more);
  const picture = run.picture
    ? element("img", { src: run.picture, alt: run.alt, loading: "lazy" })
    : element("span", { class: "caption" }, run.alt);
  const button = opener(run.id, picture, `open run ${run.id}`);
  button.append(caption);
  return button;
}

function showAllRuns() {
  const rank = { failed: 0, damaged: 1, interrupted: 2, preempted: 3, running: 4, empty: 5, duplicate: 6, finished: 7 };
  const order = (a, b) => (rank[a.state] ?? 5) - (rank[b.state] ?? 5) || inOrder(a.method || "", b.method || "")
    || inOrder(a.dataset || "", b.dataset || "") || inOrder(a.epsilon || "", b.epsilon || "") || inOrder(a.folder, b.folder);
  const rows = data.runs.slice().sort(order).map((run) => {
    const whole = runs.get(run.id) === run;
    const name = whole ? opener(run.id, run.id, `open run ${run.id}`) : run.folder;
    const state = run.state + (run.stale ? ", stale" : "");
    const badge = run.state === "finished" ? state : element("span", { class: "badge bad" }, state);
    const words = [run.method, run.dataset, run.epsilon, run.seed, run.scale].map((word) => element("td", {}, word ?? "–"));
    return element("tr", {}, element("td", { class: "name" }, name), element("td", {}, badge), ...words,
      element("td", {}, run.remark || ""));
  });
  byId("all-runs").tBodies[0].replaceChildren(...rows);
}

const pairs = (list) => element("dl", { class: "pairs" },
  ...list.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));

const bullets = (lines) => element("ul", {}, ...lines.map((line) => element("li", {}, line)));

function grid({ head, rows }, label) {
  const top = element("tr", {}, ...head.map((word) => element("th", { scope: "col" }, word)));
  const body = rows.map((row) => element("tr", {}, ...row.map((word) => element("td", {}, word))));
  const table = element("table", {}, element("thead", {}, top), element("tbody", {}, ...body));
  return element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
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
  for (const remark of run.remarks) parts.push(element("p", { class: "remark" }, remark));
  parts.push(element("h3", {}, "Privacy ledger"), ...ledgerParts(run.ledger));
  parts.push(element("h3", {}, "Figures"));
  if (!run.reports.length) parts.push(element("p", {}, "Not measured."));
  for (const report of run.reports) {
    parts.push(element("h4", {}, `${report.protocol}: ${report.samples}`), pairs(report.figures));
    if (report.notes.length) parts.push(bullets(report.notes));
  }
  parts.push(element("h3", {}, "Samples"));
  parts.push(run.picture ? element("img", { src: run.picture, alt: run.alt }) : element("p", {}, run.alt));
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
    ? `${run.method}, ${run.dataset}, ε budget ${run.epsilon}, seed ${run.seed} (${run.id})`
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

for (const link of document.querySelectorAll('nav a[href^="#"], .skip')) {
  link.addEventListener("click", (event) => { // the address is reserved for the state of the page
    event.preventDefault();
    const place = byId(link.getAttribute("href").slice(1));
    place.scrollIntoView();
    place.focus({ preventScroll: true });
  });
}

const tables = [...document.querySelectorAll("details.table")];
byId("table-search").addEventListener("input", () => {
  const query = byId("table-search").value.trim().toLowerCase();
  for (const table of tables) table.hidden = !table.dataset.name.includes(query);
  byId("tables-none").hidden = !tables.length || tables.some((table) => !table.hidden);
});
const setOpen = (open) => { for (const table of tables) if (!table.hidden) table.open = open; };
byId("tables-open").addEventListener("click", () => setOpen(true));
byId("tables-close").addEventListener("click", () => setOpen(false));
addEventListener("beforeprint", () => setOpen(true));

addEventListener("popstate", () => { readAddress(); show(); });
addEventListener("hashchange", () => { readAddress(); show(); });
makeFilters();
showAllRuns();
readAddress();
show();
