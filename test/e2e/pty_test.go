//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// A terminal is a process with a terminal of its own, as a user at a keyboard has it.
type terminal struct {
	*process
	master *os.File
}

// startTerminal runs cmd on a new terminal of that size.
func startTerminal(cmd *exec.Cmd, rows, cols uint16) (*terminal, error) {
	master, slave, err := openPTY()
	if err != nil {
		return nil, fmt.Errorf("opening a terminal: %w", err)
	}
	defer slave.Close()
	t := &terminal{master: master}
	if err := t.resize(rows, cols); err != nil {
		master.Close()
		return nil, err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	t.process, err = startWith(cmd, func(out io.Writer) {
		io.Copy(out, master) // ends with EIO when the last user of the slave is gone
	})
	if err != nil {
		master.Close()
		return nil, err
	}
	return t, nil
}

func openPTY() (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	err = errors.Join(err, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

func (t *terminal) resize(rows, cols uint16) error {
	return unix.IoctlSetWinsize(int(t.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
}

// enter types a line.
func (t *terminal) enter(line string) error {
	_, err := io.WriteString(t.master, line+"\n")
	return err
}

// close ends the process and gives the terminal back.
func (t *terminal) close() {
	t.kill()
	t.master.Close()
}
