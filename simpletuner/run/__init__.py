"""The composition root: a plan walks through the workshops and comes out as a trained, verified file."""
