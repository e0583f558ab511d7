"""From a target to a trained, tuned and measured drafter: `gumiho data` and `gumiho train`."""
