"""Seeded evaluation on prompts that were not trained on."""
