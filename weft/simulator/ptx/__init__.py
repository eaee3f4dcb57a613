"""Interpreter of inline PTX for the threads of a program: what communicating kernels write.

``parsing`` reads the text, ``registers`` has the instructions that touch no memory, ``accesses`` the ones that do, and
``running`` executes a block of assembly. What is not known raises NotInterpretable with its instruction.
"""
