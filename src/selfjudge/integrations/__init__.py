"""Where selfjudge meets other programs. Nothing in the core imports from here."""
