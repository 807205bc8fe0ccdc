"""Where bytes live and how they move: ledger, arenas, lanes, flags, files. Knows no ``nn.Module``."""
