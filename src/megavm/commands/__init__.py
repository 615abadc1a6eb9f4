"""The commands of `megavm`, one module each.

Shared code: `options` declares options, `terminal` prints, `model` loads a model.
"""
