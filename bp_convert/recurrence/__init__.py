"""What recurrent layers compute, on tensors and sizes alone: steps, ways to run, their cost."""
