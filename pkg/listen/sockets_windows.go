package listen

import (
	"errors"
	"os"
	"syscall"
)

// duplicate returns a copy of a socket: on Windows never.
func duplicate(syscall.Conn) (*os.File, error) { return nil, errors.ErrUnsupported }
