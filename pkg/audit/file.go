package audit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// lookEvery is how often the path is compared with the open file.
const lookEvery = time.Second

// output is where the lines go. One goroutine owns it.
//
// If somebody has renamed or removed the file, output opens a file at the path again. It looks at most once a second,
// when it writes an event. So logrotate needs to send no signal. output opens the new file before it closes the old
// one. If opening fails, it writes further lines to the old file, and logs the failure.
type output struct {
	cfg     Config          // set once
	failing *tunnel.Repeats // limits the lines of the log about this output; set once

	file   *os.File  // nil: standard output, or not open
	looked time.Time // when the path was compared with file
	torn   bool      // only a part of the last line was written
}

// open opens the file if it is not open.
func (o *output) open() error {
	if o.cfg.Path == Stdout || o.file != nil {
		return nil
	}
	f, err := openFile(o.cfg)
	if err != nil {
		return fmt.Errorf("opening the audit file: %w", err)
	}
	o.file, o.looked, o.torn = f, time.Now(), false
	return nil
}

// openFile opens the file of cfg, to append to it.
func openFile(cfg Config) (*os.File, error) {
	// Without O_NONBLOCK, opening a FIFO would wait for a reader. For a regular file, O_NONBLOCK changes nothing.
	flags := os.O_APPEND | os.O_WRONLY | syscall.O_NONBLOCK
	if cfg.Existing {
		flags |= noFollow
	} else {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(cfg.Path, flags, 0o600)
	if err != nil {
		return nil, explained(err)
	}
	info, err := f.Stat()
	if err == nil && cfg.Existing && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", cfg.Path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	// The file's group may read it, such as the group of a log collector. Windows has no such modes.
	if mode := info.Mode(); mode.IsRegular() && mode.Perm()&0o027 != 0 && runtime.GOOS != "windows" {
		cfg.Log.Warn("other users can read or change the audit file: chmod 600 "+cfg.Path, "mode", mode.Perm().String())
	}
	return f, nil
}

// explained adds advice to the error of opening a file.
func explained(err error) error {
	switch {
	case errors.Is(err, syscall.ELOOP):
		return fmt.Errorf("%w; a symbolic link is not followed here", err)
	case errors.Is(err, syscall.ENXIO):
		return fmt.Errorf("%w; nobody reads from this FIFO: start its reader first", err)
	}
	return err
}

// write writes a line to the file that the path names now.
func (o *output) write(line []byte) error {
	w := o.cfg.Stdout
	if o.cfg.Path != Stdout {
		o.follow()
		if err := o.open(); err != nil {
			return err
		}
		w = o.file
	}
	return o.writeTo(w, line)
}

// writeTo writes a line to w. If only a part of the last line was written, writeTo begins a new line first.
func (o *output) writeTo(w io.Writer, line []byte) error {
	if o.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := w.Write(line)
	if n > 0 {
		o.torn = line[n-1] != '\n'
	}
	return err
}

// follow opens the file again if the path names another file, or no file. Each look costs two system calls.
func (o *output) follow() {
	if o.file == nil || time.Since(o.looked) < lookEvery {
		return
	}
	o.looked = time.Now()
	if o.isCurrent() {
		return
	}
	f, err := openFile(o.cfg)
	if err != nil {
		if skipped, ok := o.failing.Allow(err.Error()); ok {
			o.cfg.Log.Error("the audit file was renamed or removed, and cannot be opened again; "+
				"events go on into the old file", "err", err, "skipped", skipped)
		}
		return
	}
	o.file.Close() // every line was written
	o.file, o.torn = f, false
}

// isCurrent reports whether the path names the open file.
func (o *output) isCurrent() bool {
	named, err := os.Stat(o.cfg.Path)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) // with another error, keep the open file
	}
	open, err := o.file.Stat()
	return err == nil && os.SameFile(named, open)
}

// close closes the file.
func (o *output) close() error {
	if o.file == nil {
		return nil
	}
	return o.file.Close()
}
