"""What stands under the words: stock Triton (``stock``), PTX (``ptx``, the one file with assembly), the simulator."""
