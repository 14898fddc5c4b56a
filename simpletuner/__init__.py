"""Fine-tunes Kandinsky 5 Image, Kandinsky 5 Video and Sana Video."""

import time

STARTED = time.monotonic()  # when the process began, but for the start of the interpreter
