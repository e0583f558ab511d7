"""How `gumiho COMMAND --help` shows options."""

from argparse import Action, ArgumentDefaultsHelpFormatter


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Shows each default once; an option that turns another one off names it."""

    def _get_help_string(self, action: Action) -> str | None:
        name = action.option_strings[0] if action.option_strings else ""
        if name.startswith("--no_"):
            return f"Turns --{name.removeprefix('--no_')} off."
        is_shown = action.default in (None, []) or "(default: " in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)
