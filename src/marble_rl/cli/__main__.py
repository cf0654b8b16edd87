"""`python -m marble_rl.cli`, which torchrun can start."""

from marble_rl.cli import main

if __name__ == "__main__":
    main()
