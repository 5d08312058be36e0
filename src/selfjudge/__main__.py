"""`python -m selfjudge`."""

from selfjudge.cli.main import main

main()
