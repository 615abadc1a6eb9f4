"""The commands of `megavm`, one module each.

They share their options (`options`), what they print (`terminal`) and how they load a model
(`model`).
"""
