"""How each family of models is spread over a mesh: one file a family, one ordered recipe in each."""
