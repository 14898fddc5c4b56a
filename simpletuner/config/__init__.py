"""One schema of options, read from JSON, TOML, env files and flags."""
