"""`selfjudge eval`: what rules gain and cost on tasks."""
