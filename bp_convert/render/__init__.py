"""Plans and reports as people read them: terminal, Markdown, HTML, JSON, and one verdict."""
