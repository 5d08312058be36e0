"""Where prompts come from: built in, files, tasks, the target itself."""
