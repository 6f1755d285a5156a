package setup

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// unitText is the unit for the edge. A test holds it to deployment/systemd/tunnel-edge.service.
//
//go:embed tunnel-edge.service
var unitText string

const (
	unitName = "tunnel-edge"
	unitFile = "/etc/systemd/system/tunnel-edge.service"

	// Paths in unitText, which newSystemdUnit replaces by those of this machine.
	unitProgram = "/usr/local/bin/tunnel"
	unitDir     = DefaultDir
)

// systemdUnit is the unit for this machine, and the path of systemctl.
type systemdUnit struct{ text, systemctl string }

// errNoSystemd says that this machine has no systemd.
var errNoSystemd = errors.New("there is no systemctl here")

// newSystemdUnit checks that systemd could run the edge with these files. It installs nothing.
func newSystemdUnit(files *nodeFiles) (*systemdUnit, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if program, err = filepath.EvalSymlinks(program); err != nil {
		return nil, err
	}
	systemctl, err := exec.LookPath("systemctl")
	if err != nil {
		return nil, errNoSystemd
	}
	failed := &stepError{step: "systemd"}
	switch {
	case os.Geteuid() != 0:
		failed.err = errors.New("only root may add a unit")
		failed.fix = "Run this with sudo: … | sudo tunnel join --systemd"
	case hidden(program):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", program)
		failed.fix = "Install the program first: sudo install -m 755 " + shellQuote(program) + " " + unitProgram
	case hidden(files.dir):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", files.dir)
		failed.fix = "Leave --dir out: the files go to " + DefaultDir + "."
	case !enterable(files.dir):
		failed.err = fmt.Errorf("the unit's user, which is not root, may not enter %s", files.dir)
		failed.fix = "chmod 755 " + shellQuote(files.dir) + ": what is secret in it has a mode of its own."
	case strings.ContainsAny(program+files.dir, " \t%\"'\\$"):
		failed.err = fmt.Errorf("a unit cannot name %s or %s as they are", program, files.dir)
		failed.fix = "Choose paths without blanks, quotes and % signs."
	default:
		text := strings.Replace(unitText, unitProgram+" edge", program+" edge", 1)
		text = strings.Replace(text, unitDir+"/"+edgeFile, filepath.Join(files.dir, edgeFile), 1)
		return &systemdUnit{text, systemctl}, nil
	}
	return nil, failed
}

// hidden reports whether the unit cannot see path, because of ProtectHome or PrivateTmp.
func hidden(path string) bool {
	for _, dir := range []string{"/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/"} {
		if strings.HasPrefix(path+"/", dir) {
			return true
		}
	}
	return false
}

// enterable reports whether every user may read and enter a folder.
func enterable(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode().Perm()&0o005 == 0o005
}

// install writes the unit, and has systemd start it now and at boot. A running edge is
// restarted, since it may hold another certificate.
func (u *systemdUnit) install(ctx context.Context) error {
	if err := overwrite(unitFile, newFile{mode: publicFile, content: []byte(u.text)}); err != nil {
		return &stepError{step: "systemd", err: err, fix: "This machine has joined; only the unit is missing."}
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", unitName}, {"restart", unitName}} {
		out, err := exec.CommandContext(ctx, u.systemctl, args...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
			return &stepError{
				step: "systemd", err: err,
				fix: "This machine has joined; the unit is " + unitFile + ", and journalctl -u " + unitName + " says more.",
			}
		}
	}
	return nil
}
