"""An optimizer update of other programs beside ours, from their own code: docs/performance.md.

A checkout of theirs is read and never imported as a package: it would need CUDA, DeepSpeed and a run of its own. The
statements of their update are taken out of the file as they are and run on the model and batch of `marble bench`.
"""
