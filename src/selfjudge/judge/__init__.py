"""The judge: a tiny classifier over what the verification pass computed anyway."""
