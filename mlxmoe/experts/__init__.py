"""The expert cache: where experts lie on disk, the slots that hold some of them, and who gives way."""
