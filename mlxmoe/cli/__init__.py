"""The mlxmoe command: the only place that prints or exits."""
