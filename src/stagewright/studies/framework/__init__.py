"""Values that every study is built from: the study and its parts, its options, its tables and phrases."""
