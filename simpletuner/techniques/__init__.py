"""Methods that change the mathematics of a step, one file each."""
