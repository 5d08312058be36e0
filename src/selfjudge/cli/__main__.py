"""`python -m selfjudge.cli`."""

from selfjudge.cli.main import main

main()
