"""Model runtimes that turn prompts into completions."""
