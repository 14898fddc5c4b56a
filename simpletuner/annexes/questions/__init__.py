"""The machine that asks: one question at a time, in a terminal or through a pipe."""
