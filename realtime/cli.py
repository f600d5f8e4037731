"""The `realtime` command: serve, say, probe, bench."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from realtime import __version__
from realtime import bench as bench_command
from realtime import probe as probe_command
from realtime import say as say_command
from realtime.errors import ConfigError, ModelError, TTSError

EXIT_FAILED = 1
EXIT_UNUSABLE = 2

logger = logging.getLogger(__name__)

SERVE_EPILOG = """examples:
  realtime serve                                   the embedded voice on 127.0.0.1:8000
  realtime serve configs/wren.toml --port 9000
  realtime serve --set engine.max_streams=4 --set server.token=secret
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0 = fine, 1 = a request failed, 2 = the command, its settings or the model can't be used."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        return int(args.run(args))
    except (ConfigError, ModelError) as error:
        print(f"realtime: {error.message}", file=sys.stderr)
        return EXIT_UNUSABLE
    except TTSError as error:
        print(f"realtime: {error.message} ({error.code})", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except Exception:
        logger.exception("failed")
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="realtime", description="Real-time speech: incremental text in, 48 kHz PCM out."
    )
    parser.add_argument("--version", action="version", version=f"realtime {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log everything, text included")
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser(
        "serve",
        help="run the server",
        description="Runs the server until SIGTERM or Ctrl-C; streams may finish, a second signal hurries.",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("config", nargs="?", type=Path, help="TOML file (default: the embedded voice)")
    serve.add_argument("--host", help="address to listen on; 0.0.0.0 opens it to the network")
    serve.add_argument("--port", type=int, help="0 takes a free one")
    serve.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting, repeatable"
    )
    serve.set_defaults(run=_serve)

    say = commands.add_parser(
        "say", help="speak a text without a server", description="Speaks a text into a WAV."
    )
    probe = commands.add_parser("probe", help="measure a server as a voice agent would")
    bench = commands.add_parser("bench", help="measure a server under load, or simulate one")
    say.set_defaults(run=say_command.main)
    say_command.add_arguments(say)
    probe.set_defaults(run=probe_command.main)
    probe_command.add_arguments(probe)
    bench.set_defaults(run=bench_command.main)
    bench_command.add_arguments(bench)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from realtime.config import load
    from realtime.serve import serve

    overrides = list(args.set)
    if args.host is not None:
        overrides.append(f'server.host="{args.host}"')
    if args.port is not None:
        overrides.append(f"server.port={args.port}")
    asyncio.run(serve(load(args.config, overrides)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
