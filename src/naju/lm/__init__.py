"""Language models on subword tokens: preparing text, training, evaluating and generating."""
