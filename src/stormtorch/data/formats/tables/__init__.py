"""Tables of Arrow and Parquet, also those of Hugging Face datasets."""
