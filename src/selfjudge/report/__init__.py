"""`selfjudge report`: result folders become one page. Reads files only; needs no torch."""
