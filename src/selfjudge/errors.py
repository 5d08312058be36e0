"""The one exception a user is meant to see: its text is a single line that says what is wrong and what to do."""


class SelfJudgeError(Exception):
    """Wrong input or a failed resource. The command line prints it as one line and exits with 2."""
