"""What stands under the words: stock Triton (``stock``), NVIDIA's and AMD's assembly (``ptx`` and ``gcn``, no
other file has any), the simulator (``simulated``)."""
