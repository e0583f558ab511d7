"""The generation loop: verify a draft tree, commit what the target agrees with, draft the next one."""
