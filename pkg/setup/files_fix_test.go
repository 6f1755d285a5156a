package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
)

// Files of an earlier join that this user may not read are no reason to replace them, but to use sudo.
func TestExistingFix(t *testing.T) {
	t.Parallel()
	denied := fmt.Errorf("reading: %w", &fs.PathError{Op: "open", Path: "/var/lib/node.pem", Err: fs.ErrPermission})
	if fix := existingFix(denied); !strings.Contains(fix, "Run this with sudo") || strings.Contains(fix, "--force") ||
		!strings.Contains(fix, "Nothing was changed, and the token was not sent.") {
		t.Errorf("the fix is %q", fix)
	}
	fix := existingFix(errors.New("of another node"))
	if strings.Contains(fix, "sudo") || !strings.Contains(fix, "--force") {
		t.Errorf("the fix is %q", fix)
	}
}
