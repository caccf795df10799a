def table(names, inline, ranks): return ""
