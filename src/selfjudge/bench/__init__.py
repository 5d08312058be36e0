"""Speed and drafts, measured side by side in one run."""
