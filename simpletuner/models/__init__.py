"""The families: facts that need no torch (spec, cost, options), and adapters around the classes of
diffusers.
"""
