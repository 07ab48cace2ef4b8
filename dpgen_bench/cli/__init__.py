"""The command line, `dpgen VERB`: parses arguments and calls the function of the verb."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

import argcomplete

from dpgen_bench.cli.parser import build_parser
from dpgen_bench.cli.values import default_results
from dpgen_bench.runs.remembered import Remembered, remembered
from dpgen_bench.utils.allocator import keep_freed_memory
from dpgen_bench.utils.own_folders import misnamed_methods, unused_files, using
from dpgen_bench.utils.paths import CONF, add_working_directory, libraries_first
from dpgen_bench.utils.validation import suggestion

# Verbs that read results, and then use the folders of yamls with which the runs were executed.
REMEMBERING = ("runs", "rm", "evaluate", "sample", "export", "tables", "sweep", "report", "record", "list", "audit")
LISTING = ("runs", "list", "account")  # verbs that only print; a reader that wants no more of it is no failure
# Errors of the machine and not of the code: a full disk, and files that may not be read or written.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (0: success, 1: a run failed, 2: invalid command)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, verbs = build_parser()
    argcomplete.autocomplete(parser)  # does nothing unless a shell asks for completions
    try:
        if not arguments or arguments[0] == "help":
            parser.print_help()
            return 0 if arguments else 2
        verb, rest = arguments[0], arguments[1:]
        if verb in ("-h", "--help", "--version"):
            parser.parse_args([verb])
        if verb not in verbs:
            expected = (
                f"expected one of {' '.join(verbs)}, got {verb!r}{suggestion(verb, [*verbs, '--help', '--version'])}"
            )
            print(f"dpgen: {expected}; see dpgen --help.", file=sys.stderr)
            return 2
        options = verbs[verb].parse(rest)
    except SystemExit as end:  # argparse has printed help, the version or an error
        return int(end.code or 0)
    if not _has_working_directory():
        print(
            "dpgen: expected a working directory, got one that was deleted; go to another folder with cd, and give the "
            "same command again.",
            file=sys.stderr,
        )
        return 2
    if argv is None:  # this process exists for one command
        keep_freed_memory()
    # So that a method's file in the working directory can be imported.
    (libraries_first if argv is None else add_working_directory)()
    return _call(verb, options)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _call(verb: str, options: argparse.Namespace) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from dpgen_bench.cli.verbs import VERBS, print_error

    notes = (*unused_files(options.config_dir, CONF), *misnamed_methods(options.config_dir))
    known = Remembered(tuple(options.config_dir), notes=notes)
    if not options.config_dir and verb in REMEMBERING:
        known = remembered(options.results or default_results())
    for note in known.notes:
        print(f"dpgen: note: {note}", file=sys.stderr)
    try:
        with using(known.config, known.modules):
            status = VERBS[verb](options)
            sys.stdout.flush()  # so that a closed pipe is met here
            return status
    except (ValueError, LookupError, FileNotFoundError, RuntimeError, HydraException, OmegaConfBaseException) as error:
        return print_error(error)
    except KeyboardInterrupt:
        print("dpgen: interrupted; a run continues from its last checkpoint by the same command", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python can flush what is left
        return 0 if verb in LISTING else 1
    except OSError as error:
        if error.errno not in (*FULL, *FORBIDDEN):
            raise
        what = "space on the disk" if error.errno in FULL else "access"
        print(
            f"dpgen: expected {what} for {error.filename or 'a file'}, got an error ({error.strerror}); "
            "free some or name another folder, and give the same command again: finished work is kept.",
            file=sys.stderr,
        )
        return 1
