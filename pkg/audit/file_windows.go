package audit

// noFollow is nothing on Windows: only an administrator may make a symbolic link there.
const noFollow = 0
