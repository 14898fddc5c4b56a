"""Makes the files of a run from a folder of pictures or clips; used by the command and the page."""
