"""Where bytes live and how they move: ledger, arenas, lanes, flags, files. No ``nn.Module`` is known here."""
