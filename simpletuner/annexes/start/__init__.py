"""From a folder of pictures or clips to the files of a run; the command and the page share it."""
