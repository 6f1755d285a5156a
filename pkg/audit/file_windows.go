package audit

// noFollow is 0: Windows has no such flag, and only an administrator may make a symbolic link.
const noFollow = 0
