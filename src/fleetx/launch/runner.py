"""The entry point of a worker: python -u runner.py PARENT LOG script|module TARGET ARGUMENTS...

It makes the worker die with its launcher, redirects its output to its log and runs the user's code as `__main__`. If
the code raises an exception, it writes a record of it next to $TORCHELASTIC_ERROR_FILE, in the format of torchelastic's
`@record`.

This file is run by its path, not as a module. Before the user's first line it imports only modules that cost nothing,
and nothing from fleetx.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the directory of this file, which must not shadow other modules

from types import CodeType, ModuleType, TracebackType

PADDLE_API = "FLEETX_PADDLE_API"
worker: int | None = None  # the pid that `main` made a worker; its forked children are not workers
record_file: str | None = None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, for whatever reason."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def redirect_to(log: str) -> None:
    """Send stdout and stderr to `log`, in order; O_APPEND, so that nothing is overwritten."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def code_of_script(path: str) -> tuple[CodeType, dict[str, object]]:
    """(code, attributes of `__main__`) of a file, as for `python path`."""
    import io

    full = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    return code, {"__file__": full, "__loader__": type(__loader__)("__main__", full)}  # type: ignore[name-defined]


def code_of_module(name: str) -> tuple[CodeType, dict[str, object]]:
    """(code, attributes of `__main__`) of a module, as for `python -m name`."""
    import importlib.util

    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec else None
    if spec is None or code is None:
        raise ImportError(f"no module named {name!r} that can be run")
    sys.argv[0] = spec.origin or name
    return code, {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__cached__": spec.cached,
        "__spec__": spec,
    }


class PaddleScripts:
    """An import hook that makes `import paddle` load fleetx.static.

    It is both finder and loader, so that fleetx is loaded only by a real import, not by a library that checks whether
    paddle is installed.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name not in ("paddle", "fleet_lightning"):
            return None
        from importlib.machinery import ModuleSpec, PathFinder

        if os.environ.get(PADDLE_API) != "fleetx" and PathFinder.find_spec("paddle") is not None:
            return None
        return ModuleSpec(name, PaddleScripts)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: object) -> ModuleType:
        from fleetx.paddle.static import install

        PaddleScripts.loader = install().find_spec(spec.name).loader  # type: ignore[attr-defined, union-attr]
        return PaddleScripts.loader.create_module(spec)  # type: ignore[attr-defined]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        PaddleScripts.loader.exec_module(module)  # type: ignore[attr-defined]


def serve_paddle_scripts() -> None:
    """Install the import hook: before the other finders if fleetx is requested, else after them."""
    api = os.environ.get(PADDLE_API) or None
    if api not in (None, "fleetx", "paddle"):
        sys.exit(f"{PADDLE_API}={api}: must be fleetx or paddle")
    if api != "paddle":
        sys.meta_path.insert(0 if api else len(sys.meta_path), PaddleScripts)  # type: ignore[arg-type]


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def record(error: BaseException, *, exit_code: int) -> None:
    """Report `error` to the launcher, in torchelastic's format, with additions under `fleetx`."""
    if record_file is None or os.getpid() != worker:
        return
    try:
        import json
        import time
        import traceback

        now = time.time()
        try:
            message = f"{type(error).__name__}: {error}".rstrip(": ")
        except Exception:  # from its own __str__
            message = type(error).__name__
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        data = {
            # torchelastic's timestamp is in whole seconds, too coarse to tell which of two ranks failed first
            "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}},
            "fleetx": {
                "time": now,
                "exit_code": exit_code,
                "kind": type(error).__name__,
                "follows": follows_another(error),
            },
        }
        with open(f"{record_file}.part", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file)
        os.replace(f"{record_file}.part", record_file)  # so that the launcher never reads half a record
    except Exception:
        pass  # a full disk, a json.py next to the script: do not hide the user's error, which is still logged


def follows_another(error: BaseException | None) -> bool:
    """Whether another rank caused this error or one in its chain. fleetx.comm.peers marks such errors."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, "last_words"):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def print_interrupted(error: BaseException) -> None:
    """After Ctrl-C, print only where the script was, not a traceback."""
    location, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        location = f" at {code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    print(f"interrupted{location}", file=sys.stderr)


def exit_code_of(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    return exit_.code & 0xFF if isinstance(exit_.code, int) else 1


def run(kind: str, target: str) -> None:
    import faulthandler

    faulthandler.enable()  # writes the Python stack to the log if C code crashes
    try:
        code, attributes = (code_of_module if kind == "module" else code_of_script)(target)
        main = ModuleType("__main__")
        main.__dict__.update({"__builtins__": __builtins__, "__package__": None, "__cached__": None, **attributes})
        sys.modules["__main__"] = main  # where pickle and multiprocessing look up the user's names
        exec(code, main.__dict__)
    except BaseException as error:
        error.__traceback__ = without_our_frames(error.__traceback__)
        if isinstance(error, SystemExit):
            if code_of_exit := exit_code_of(error):
                record(error, exit_code=code_of_exit)
            raise
        if isinstance(error, KeyboardInterrupt):
            record(error, exit_code=130)
            print_interrupted(error)
            sys.exit(130)
        error = getattr(sys.excepthook, "leaving", lambda error: error)(error)  # set by fleetx.comm.peers, if loaded
        # As Python itself does, so that exit functions know that the script failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error  # type: ignore[attr-defined]  # since Python 3.12
        record(error, exit_code=1)  # before the excepthook tells the other ranks, whose errors follow this one
        sys.excepthook(type(error), error, error.__traceback__)
        end(1)


def end(code: int) -> None:
    """Exit as Python does, but without destroying objects one by one: with torch that can take a second, which would
    delay a restart."""
    import atexit
    import contextlib
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed stream, a full disk
            stream.flush()
    os._exit(code)


def main(command: list[str]) -> None:
    """Make this process a worker: PARENT LOG script|module TARGET ARGUMENTS..."""
    global worker, record_file
    parent, log, kind, target, *arguments = command
    die_with(int(parent))
    redirect_to(log)
    worker = os.getpid()
    # Not the error file itself: the user's own `@record` may write that one without ending the process.
    record_file = f"{path}.last" if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) else None
    serve_paddle_scripts()
    sys.argv = [target, *arguments]
    run(kind, target)


if __name__ == "__main__":
    main(sys.argv[1:])
