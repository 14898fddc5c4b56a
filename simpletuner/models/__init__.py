"""The model families: facts that need no torch, and adapters around the classes of diffusers.

A family's folder has its facts (`spec`, `cost`, `options`), which planning reads without torch, and
its adapter, which training and sampling call.
"""
