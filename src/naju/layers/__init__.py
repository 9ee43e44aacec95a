"""Small pieces that mixers are made of; none of them knows about a model."""
