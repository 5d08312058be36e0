"""`selfjudge train`: labels become a judge."""
