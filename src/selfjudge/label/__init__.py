"""`selfjudge label`: which draft tokens may stand, without annotation."""
